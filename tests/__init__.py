"""The proof: every claim of the code above is checked here, and broken rings show that the checks can fail.

Read basics/test_ring_attn.py first. A folder here has the tests of the folder of its name, and basics/ those of
ringlab/support too. orders/ plays every order of messages, for chapters 4 and 16. pages/ has the tests of what people
read: chapters, exercises, pictures, documents and measured numbers. wrong/ has the wrong rings, models and answers that
they need. The files beside this one are shared.
"""
