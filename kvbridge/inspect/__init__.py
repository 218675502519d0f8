"""The command `python -m kvbridge.inspect`: what a KV-cache page is, on the terminal and for machines.

    SOURCE -> manifests, planned or read -> show | map | diff | check -> table, json, sarif, github, text, svg, html

Data goes to stdout, remarks to stderr. Exit: 0 clean, 1 findings or a difference, 2 input or usage, 3 engine missing.
Every command imports only what it needs, and none of those that plan imports torch or an engine. The arguments are read
with argparse: building and running an empty typer application costs more than a whole `show` may.
"""
