"""The modules of scripts/lab, which runs a command in a virtual machine. See docs/lab.md."""
