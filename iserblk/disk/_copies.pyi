from iserblk.disk.copies import Copies as Copies
