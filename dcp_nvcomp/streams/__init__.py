"""A stream of bytes as one compressed file of which any range can be read: what torch.save or safetensors write.

write   tensors, and bytes in their order  -> StreamWriter -> a data file: a record for each memory of a tensor whose
        bytes are in the stream, then `.stream`: which pieces the stream has, and all other bytes
read    StreamReader.seek, readinto  -> the blocks that have these bytes
"""
