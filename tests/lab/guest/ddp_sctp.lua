-- For tshark, which knows DDP and RDMAP behind MPA, and names the PPIDs of RFC 5043, but does not
-- connect the two: the DDP-SSN (and the Function Code), and behind it what it knows.
local adaptation = Proto("ddp_sctp", "DDP over SCTP")
local ssn = ProtoField.uint16("ddp_sctp.ssn", "DDP-SSN")
local code = ProtoField.uint16("ddp_sctp.function", "Function Code")
adaptation.fields = { ssn, code }

function adaptation.dissector(buffer, packet, tree)
  tree:add(adaptation, buffer(0, 2)):add(ssn, buffer(0, 2))
  Dissector.get("iwarp_ddp_rdmap"):call(buffer(2):tvb(), packet, tree)
end

local control = Proto("ddp_sctp_control", "DDP Stream Session Control")
function control.dissector(buffer, packet, tree)
  local branch = tree:add(adaptation, buffer(0, 4))
  branch:add(ssn, buffer(0, 2))
  branch:add(code, buffer(2, 2))
end

DissectorTable.get("sctp.ppi"):add(16, adaptation)
DissectorTable.get("sctp.ppi"):add(17, control)
