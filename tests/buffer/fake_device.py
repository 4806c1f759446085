"""A device with streams that is not there. Who waits for whom is noted and nothing else: for races see tests/device_fake."""

from megabucket.comm import GradStreams


class FakeStream:
    def __init__(self, device, stream_id):
        self.device, self.stream_id, self.waited_for = device, stream_id, []

    def wait_stream(self, stream):
        self.waited_for.append(stream.stream_id)

    def __enter__(self):
        self._before, self.device.current_stream_id = self.device.current_stream_id, self.stream_id

    def __exit__(self, *_):
        self.device.current_stream_id = self._before


class Device:
    """A device whose current stream is what the test says: what a group asks of an ``Accelerator``."""

    def __init__(self):
        self.streams = {stream_id: FakeStream(self, stream_id) for stream_id in range(4)}
        self.current_stream_id, self.num_streams_made = 0, 0

    def current_id(self):
        return self.current_stream_id

    def current(self):
        self.num_streams_made += 1
        return self.streams[self.current_stream_id]

    def grad_streams(self):
        return GradStreams(self)
