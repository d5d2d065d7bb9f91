"""The target tells where it is: registration with iSNS, and an answer to SLP."""
