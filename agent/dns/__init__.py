"""The DNS server of a sidecar: local answers from the name table, everything else forwarded."""
