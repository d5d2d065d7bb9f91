"""Discovery: find targets and their portals (SendTargets, iSNS), and rank the portals."""
