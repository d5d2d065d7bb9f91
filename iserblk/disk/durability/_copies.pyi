from iserblk.disk.durability.copies import Copies as Copies
