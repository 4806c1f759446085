"""A device with streams that is not there."""

from contextlib import contextmanager

from megabucket.buffer.streams import GradStreams


class FakeStream:
    def __init__(self, name):
        self.name, self.waited_for = name, []

    def wait_stream(self, stream):
        self.waited_for.append(stream.name)


class Device:
    """A device whose current stream is what the test says."""

    def __init__(self):
        self.streams = {handle: FakeStream(handle) for handle in range(4)}
        self.current, self.num_streams_made = 0, 0

    def stream(self):
        self.num_streams_made += 1
        return self.streams[self.current]

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def grad_streams(self):
        return GradStreams(lambda: self.current, self.stream, self.on)
