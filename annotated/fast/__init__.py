"""The same numbers, faster: prepared parts, the loss in chunks, engines that one asks for.

`prepare`, `chunked_loss`, `c_engine`, `engines`
"""
