"""Generated messages that `xds-protos` does not have: the name table and the certificate service."""
