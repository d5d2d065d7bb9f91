"""The device server: what a SCSI command does, behind ``iserblk.target.seam``.

device                         routes by LUN, keeps unit attentions
commands                       the table of commands
primary, block, provisioning   SPC, SBC, and SBC's thin provisioning
reservations                   who is registered, and what that forbids
unit, task, ended              a logical unit, one command of it, and how one ends
guard, unflushed               what COMPARE AND WRITE and flushes that fail need
"""
