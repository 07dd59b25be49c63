"""Is your ring right, and if not, which mistake is it?"""
