"""SpecDec: a block drafter for encoder-decoders, which reads the encoder's rows and fills a block in one pass."""
