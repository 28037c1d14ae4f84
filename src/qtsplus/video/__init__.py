"""A video is read and encoded once; its subtitles; what it will take."""
