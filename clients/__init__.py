"""Adaptors for programs that choose their compiler by a protocol of their own, instead of by a name of `torch.compile`."""
