"""The model as the paper prints it; it needs torch and jaxtyping alone.

`attention`, `multi_head`, `feed_forward`, `embeddings`, `positional`, `masking`, `stacks`,
`transformer`
"""
