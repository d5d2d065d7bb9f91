"""Finding targets and the ways to them: SendTargets, iSNS, and which portal to try first."""
