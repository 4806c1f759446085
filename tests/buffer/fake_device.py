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


class FakeEvent:
    def __init__(self, device):
        self.device, self.stream_id = device, device.current_stream_id

    def wait(self):
        self.device.streams[self.device.current_stream_id].waited_for.append(f"an event of {self.stream_id}")


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

    def record(self):
        return FakeEvent(self)

    @property
    def waited_for(self):
        """What streams have waited for, by the number of those that have."""
        return {stream_id: stream.waited_for for stream_id, stream in self.streams.items() if stream.waited_for}

    def grad_streams(self):
        return GradStreams(self)
