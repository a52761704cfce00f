"""Speed of `annotated` beside other libraries, measured in alternation within one run.

`python -m benchmarks --help` lists the options.
"""
