"""What is counted of each LUN, and how it gets out: as Prometheus text, over a socket.

``counting`` is in the data path, and knows nothing of the rest; ``reading`` are its numbers at one
moment; ``exposition`` makes text of them, and the other way round; ``serving`` answers those who
asks (trio), ``scraping`` asks.
"""
