"""When a GPU's reading is a fault. Each line of `rules.csv` is one rule and names the file with its
logic.

`registry` reads the table, `reading` defines a rule's input and output.
"""
