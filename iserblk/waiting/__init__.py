"""Ways to wait: descriptors in trio, busy polling, and strands for many short requests."""
