"""The tasks of one connection of the target: their slots, and what is done with them."""
