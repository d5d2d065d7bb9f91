"""Datamovers: how iSCSI PDUs and their data travel (RFC 5047; RFC 7145 section 3)."""
