"""Speed side by side: `annotated` against its peers, interleaved in one run.

`python -m benchmarks --help`.
"""
