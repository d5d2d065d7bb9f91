"""Discovery: find targets and their portals (SendTargets, iSNS, SLP), and rank the portals."""
