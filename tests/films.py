"""Small films with the time painted into every frame, so that a frame says when it is shown."""

from fractions import Fraction

import av
import numpy as np

SIDE = 96  # pixels; 4 x 4 blocks are the bits of a time in milliseconds
CLOCKS = {  # milliseconds at which the frames of a film are shown
    "constant": range(0, 3000, 40),
    "late": range(2000, 5000, 40),
    "dropped": [*range(0, 1000, 40), *range(2000, 3000, 40)],
    "variable": [0, 2000, *range(3000, 4000, 100), 4000, 6000],
}


def paint(milliseconds, side=SIDE):
    """`[side, side, 3]` uint8."""
    bits = (milliseconds >> np.arange(16) & 1).reshape(4, 4).astype(np.uint8)
    return np.repeat(np.kron(bits, np.full((side // 4,) * 2, 255, np.uint8))[:, :, None], 3, axis=2)


def read_paint(frame):
    """The milliseconds that a frame shows, which may have been scaled."""
    height, width = frame.shape[:2]
    blocks = frame[height // 8 :: height // 4, width // 8 :: width // 4, 0][:4, :4]
    return int(((blocks.reshape(16) > 128) << np.arange(16)).sum())


def write_film(path, codec, milliseconds, rate=None, later=0, **options):
    """
    A film whose frames are shown at the given times, which are painted into them.

    Args:
        rate: frames a second of a constant rate; `None` writes the times in milliseconds.
        later: milliseconds that are painted too late, as in the second part of a recording.
        options: of the encoder; besides `pix_fmt`, `side`, `aspect` of a pixel, the clock's `offset` in seconds, and
            `mirrored` for the picture of a front camera.
    """
    pix_fmt = options.pop("pix_fmt", "yuv420p")
    aspect = options.pop("aspect", None)
    side = options.pop("side", SIDE)
    offset = options.pop("offset", 0)
    turn = -1 if options.pop("mirrored", False) else 1
    with av.open(str(path), "w", options={"output_ts_offset": f"{offset}"} if offset else {}) as container:
        stream = container.add_stream(codec, rate=rate or 25)
        stream.width = stream.height = side
        stream.pix_fmt = pix_fmt
        stream.options = options
        base = Fraction(1, rate or 1000)
        stream.codec_context.time_base = base
        if aspect:
            stream.codec_context.sample_aspect_ratio = aspect
        for one in milliseconds:
            frame = av.VideoFrame.from_ndarray(
                np.ascontiguousarray(paint(one + later, side)[:, ::turn]), format="rgb24"
            )
            frame.pts = round(one / 1000 / base)
            frame.time_base = base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def packets_of(path):
    """Where the packets of a video begin in its file, and what is in them."""
    with av.open(str(path)) as container:
        return [(packet.pos, bytes(packet)) for packet in container.demux(video=0) if packet.size]


def spoil(path, numbers, kept):
    """Writes zeros over packets of a video, except over so many bytes at their beginning."""
    packets = packets_of(path)
    data = path.read_bytes()
    for number in numbers:
        _, packet = packets[number]
        spoilt = packet[:kept].ljust(len(packet), b"\0")
        data = data.replace(packet, spoilt)
    path.write_bytes(data)
