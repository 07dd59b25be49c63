"""What the ring is made of: attention, online softmax, blocks, messages, ranks.

Read online_softmax.py first, then blocking_messages.py. chunks.py and ring_attn_command.py check input: skip them.
"""
