"""The wrong kernel: half of the speed, with every number right.

The numbers were measured once, by hand, on one H100 with torch 2.11, before the ring asked PyTorch for its kernel. No
script of this project has measured them.
"""

from figures import shapes
from ringlab.support import drawing

FLASH, CUDNN = "FlashAttention 2, what the ring took", "cuDNN, what PyTorch takes by itself"
COLOURS = {FLASH: "#8C1D40", CUDNN: drawing.INK}  # not those of blocks: these are kernels
# H, S, D and "causal" or "full": TFLOP/s (forward, backward) of FLASH, and of CUDNN. Causal is counted as half.
KERNELS = {
    ("32", 4_096, 128, "causal"): ((260, 233), (491, 426)),
    ("32", 4_096, 128, "full"): ((343, 279), (623, 539)),
    ("32", 16_384, 128, "causal"): ((338, 313), (641, 568)),
    ("32", 16_384, 128, "full"): ((352, 310), (647, 542)),
    ("32 on 8", 16_384, 128, "causal"): ((312, 304), (628, 512)),
    ("16", 16_384, 64, "causal"): ((271, 272), (449, 446)),
    ("16", 16_384, 64, "full"): ((302, 282), (433, 466)),
}
# A zigzag ring of P ranks in turn on one GPU, S = 131,072, H = 8, D = 128, both passes: share of SDPA with each kernel
RINGS = {2: (0.557, 0.977), 4: (0.548, 0.928), 8: (0.531, 0.871)}


def draw() -> drawing.Picture:
    """Two panels of horizontal bars, measured on one H100. Left: TFLOP/s of one attention call in the forward pass, for
    seven shapes. FlashAttention 2 reaches 260 to 352, cuDNN 433 to 647. Right: a causal ring of 2, 4 and 8 ranks on
    131,072 tokens, as a share of the speed of PyTorch's own attention: 0.56, 0.55 and 0.53 with FlashAttention 2; 0.98,
    0.93 and 0.87 with cuDNN.
    """
    said = "bfloat16   measured once, by hand, on one H100 with torch 2.11"
    figure, page = shapes.headed(
        560, draw, "The wrong kernel: half of the speed, and every number is right", {65: said}
    )
    names = [f"H = {H}, S = {S // 1024}K, D = {D}, {mask}" for H, S, D, mask in KERNELS]
    forward = [(flash[0], cudnn[0]) for flash, cudnn in KERNELS.values()]
    panels = (
        ((0.31, 0.17, 0.31, 0.62), "one call, TFLOP/s, forward", names, forward, "{:.0f}", 760),
        (
            (0.705, 0.17, 0.265, 0.62),
            "a ring, share of PyTorch's speed",
            [f"P = {P}" for P in RINGS],
            RINGS.values(),
            "{:.2f}",
            1.18,
        ),
    )
    for place, title, labels, pairs, form, most in panels:
        ax = shapes.numbers(figure, place, title=title)
        for i, pair in enumerate(pairs):
            for j, (value, colour) in enumerate(zip(pair, COLOURS.values(), strict=True)):
                y = i + 0.4 * (j - 0.5)
                ax.barh(y, value, 0.36, color=colour)
                look = {"va": "center", "fontsize": 0.72 * drawing.TEXT, "color": colour}
                ax.annotate(form.format(value), (value, y), (5, 0), textcoords="offset points", **look)
        ax.set(xlim=(0, most), ylim=(len(labels) - 0.4, -0.6))
        ax.set_yticks(range(len(labels)), labels)
        ax.grid(axis="y", visible=False)
    for x, (name, colour) in zip((60, 520), COLOURS.items(), strict=True):
        shapes.box(page, x, 520, 22, 16, fc=colour)
        drawing.write(page, x + 32, 528, name)
    return figure
