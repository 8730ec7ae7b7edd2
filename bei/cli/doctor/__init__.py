"""``bei doctor``: what this machine can build and serve, and what it lacks.

``facts`` reads the machine, ``targets`` asks the functions that build and serve use themselves, ``attention`` has
single layers built, ``advice`` says it in sentences, ``rendering`` prints it. A fact that cannot be had is listed as
unknown with its reason. Nothing here opens a connection. The builder comes as an argument, from the CLI.
"""
