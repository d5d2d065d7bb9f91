"""The code of scripts/figures."""
