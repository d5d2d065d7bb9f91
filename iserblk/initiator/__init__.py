"""Sessions: connect, login, submit, and the two drivers that wait for them."""
