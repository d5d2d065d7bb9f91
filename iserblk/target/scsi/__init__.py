"""The device server, which executes SCSI commands. Its interface is ``iserblk.target.seam``.

device                         routes commands by LUN, keeps unit attentions
commands                       the table of commands
primary, block, provisioning   commands of SPC, of SBC, and of SBC's thin provisioning
reservations                   persistent reservations of a LUN
unit, task, ended              a logical unit, one command of it, and the ways a command fails
guard                          makes COMPARE AND WRITE atomic
unflushed                      reports a failed flush to every session that it concerns
"""
