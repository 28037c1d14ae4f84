"""Small videos with the time painted into every frame, so that a frame says when it is shown."""

from fractions import Fraction

import av
import numpy as np

SIDE = 96  # pixels; 4 x 4 blocks are the bits of a time in milliseconds
CLOCKS = {  # milliseconds at which the frames of a video are shown
    "constant": range(0, 3000, 40),
    "late": range(2000, 5000, 40),
    "dropped": [*range(0, 1000, 40), *range(2000, 3000, 40)],
    "variable": [0, 2000, *range(3000, 4000, 100), 4000, 6000],
}


def paint(milliseconds, side=SIDE):
    """`[side, side, 3]` uint8."""
    bits = milliseconds >> np.arange(16) & 1
    shades = 255 * bits.astype(np.uint8)
    block_side = side // 4
    grey = shades.reshape(4, 4).repeat(block_side, axis=0).repeat(block_side, axis=1)
    return np.stack([grey] * 3, axis=2)


def read_paint(frame):
    """The milliseconds that a frame shows, which may have been scaled."""
    height, width, _ = frame.shape
    middles = np.array([1, 3, 5, 7])
    rows = middles * height // 8
    columns = middles * width // 8
    shades = frame[rows][:, columns, 0]
    bits = shades.reshape(16) > 128
    milliseconds = bits << np.arange(16)
    return int(milliseconds.sum())


def write_video(
    path,
    codec,
    milliseconds,
    rate=None,
    later=0,
    pix_fmt="yuv420p",
    aspect=None,
    side=SIDE,
    offset=0,
    mirrored=False,
    **options,
):
    """
    A video whose frames are shown at the given times, which are painted into them.

    Args:
        rate: frames a second of a constant rate; `None` writes the times in milliseconds.
        later: milliseconds that are painted too late, as in the second part of a recording.
        aspect: width of a pixel by its height.
        offset: seconds by which the clock of the file is ahead.
        mirrored: whether the picture is mirrored, as by a front camera.
        options: of the encoder.
    """
    time_base = Fraction(1, rate or 1000)
    with av.open(str(path), "w", options={"output_ts_offset": str(offset)}) as container:
        stream = container.add_stream(codec, rate=rate or 25)
        stream.width = side
        stream.height = side
        stream.pix_fmt = pix_fmt
        stream.options = options
        stream.codec_context.time_base = time_base
        if aspect:
            stream.codec_context.sample_aspect_ratio = aspect
        for shown_at in milliseconds:
            picture = paint(shown_at + later, side)
            if mirrored:
                picture = np.ascontiguousarray(picture[:, ::-1])
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = round(Fraction(shown_at, 1000) / time_base)
            frame.time_base = time_base
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
        data = data.replace(packet, packet[:kept].ljust(len(packet), b"\0"))
    path.write_bytes(data)
