"""Packets off the interfaces of a lab: packet sockets, headers, filter expressions, whose a connection is, pcapng."""
