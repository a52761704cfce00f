"""The same computations, faster: fused parts, the loss in chunks, decoding engines.

`prepare`, `chunked_loss`, `engines`
"""
