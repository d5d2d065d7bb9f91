"""RDMA-Capable Protocols: the verbs-shaped seam (``seam``) and its providers."""
