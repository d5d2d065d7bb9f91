"""SCSI for both ends: CDBs, status, sense, INQUIRY, modes, capacity, limits, LUNs.

Pure functions of bytes; nothing here knows how data moves. Decoders take bytes from the network:
they raise RemoteProtocolError("SCSI", …) where an answer cannot be used, and nothing else.

Sources: SAM-5, SPC-4 and SBC-4 of INCITS T10, named by section titles, which outlast numbering.
"""
