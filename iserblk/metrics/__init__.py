"""Metrics of each LUN: they are counted, then served as Prometheus text over a socket.

``counting`` is in the data path, and uses none of the other modules. ``reading`` has its numbers at
one moment. ``exposition`` converts them to Prometheus text and back. ``serving`` is the server (in
trio), ``scraping`` the client. ``address`` has the addresses of both.
"""
