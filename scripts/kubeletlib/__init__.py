"""The modules of scripts/kubelet, which tries the CSI plugin with a kubelet. See
docs/lab.md."""
