"""What a wrong answer means: the name of the mistake, what the numbers show, the X-ray. Read diagnosis.py first."""
