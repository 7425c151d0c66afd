"""When a GPU's reading is a fault: one line of `rules.csv` per rule, which names the file with its
logic.

`registry` reads the table, `reading` defines a rule's input and output.
"""
