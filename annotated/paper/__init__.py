"""The paper's experiments: the layers of Table 1, Table 3, constituency parsing.

`layer_types`, `table3`, `parsing`, `trees`
"""
