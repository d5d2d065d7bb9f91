"""scripts/lab: a command in a virtual machine with a full kernel. See docs/lab.md."""
