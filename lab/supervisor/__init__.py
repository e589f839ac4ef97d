"""The process that runs a lab: ``python -m lab.supervisor OPTIONS``, started by `lab.lifecycle` and by nobody else.

It starts what needs no mesh while whoever started it still reads the manifests; then it reads the mesh from standard
input, brings the lab up, answers on its control socket, and takes the lab down when it is told to, when it gets SIGTERM,
or when standard input ends. Progress goes to stdout as JSON lines: ``{"event": "ready", "info": ...}``,
``{"event": "error", ...}``, ``{"event": "down"}``.
"""
