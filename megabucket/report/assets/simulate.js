"use strict";
// The timing model of planning/simulate.py. Sums are made in the same order, so that both round alike; a test runs this
// file in a browser and compares it with the Python one.
const simulator = (() => {
  // Seconds of one collective: a line, or measured points as in MeasuredLink.
  const costS = (cost, bytes) => {
    if (!cost.points) return cost.latency_s + cost.seconds_per_byte * bytes;
    const points = cost.points;
    if (bytes <= points[0][0]) return points[0][1];
    let low = 0, high = points.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < bytes) low = middle + 1; else high = middle;
    }
    const right = Math.min(low, points.length - 1);
    const [size, seconds] = points[right - 1], [nextSize, nextSeconds] = points[right];
    const slope = (nextSeconds - seconds) / (nextSize - size);
    if (bytes > nextSize) return nextSeconds + Math.max(slope, 0) * (bytes - nextSize);
    return seconds + slope * (bytes - size);
  };

  // When each gradient is ready and each tensor needed, by tensor index.
  const prepare = work => {
    const count = work.numel.length;
    const order = work.order || Array.from({length: count}, (_, position) => count - 1 - position);
    const readyS = new Array(count), neededS = new Array(count);
    let now = 0;
    order.forEach((index, position) => {
      now = position ? now + work.backward_s[index] : work.backward_s[index];
      readyS[index] = now;
    });
    let forwardS = 0;
    for (let index = 0; index < count; index++) {
      neededS[index] = forwardS;
      forwardS += work.forward_s[index];
    }
    return {...work, order, readyS, neededS, forwardS, backwardS: readyS[order[count - 1]]};
  };

  // Walk the tensors in ready order and close a bucket at so many elements.
  const uniformPlan = (ready, bucketNumel) => {
    const buckets = [];
    let open = [], filled = 0;
    for (const index of ready.order) {
      open.push(index);
      filled += ready.numel[index];
      if (filled >= bucketNumel) {
        buckets.push(open);
        open = [];
        filled = 0;
      }
    }
    if (open.length) buckets.push(open);
    return buckets;
  };

  // What the simulation needs to know about each bucket; null seconds for one that sends nothing.
  const bucketsOf = (ready, plan, costs) => plan.map(indices => {
    let numel = 0, readyS = 0, needed = Infinity, lowest = Infinity;
    for (const index of indices) {
      numel += ready.numel[index];
      readyS = Math.max(readyS, ready.readyS[index]);
      lowest = Math.min(lowest, index);
      if (ready.numel[index]) needed = Math.min(needed, index);
    }
    const gradBytes = numel * ready.bytes_per_element, paramBytes = numel * ready.param_bytes_per_element;
    if (needed === Infinity) needed = lowest;
    return {
      numel, gradBytes, paramBytes, readyS, needed, neededS: ready.neededS[needed],
      reduceS: gradBytes ? costS(costs.reduce, gradBytes) : null,
      gatherS: costs.gather && paramBytes ? costS(costs.gather, paramBytes) : null,
      numTensors: indices.length, first: indices[0], last: indices[indices.length - 1],
    };
  });

  const gatherEnds = buckets => {
    const ends = new Array(buckets.length);
    let now = 0;
    for (let bucket = buckets.length - 1; bucket >= 0; bucket--) {
      now += buckets[bucket].gatherS || 0;
      ends[bucket] = now;
    }
    return ends;
  };

  // Seconds of a step in the steady state: simulate_step_s.
  const stepS = (ready, buckets, costs, overlap) => {
    let finish = 0, extra = 0, gathers = 0;
    for (const bucket of buckets) {
      if (bucket.reduceS === null) continue;
      finish = Math.max(finish, overlap.grads ? bucket.readyS : ready.backwardS) + bucket.reduceS;
    }
    for (const seconds of costs.extra_s) extra += seconds;
    let firstForward = ready.forwardS;
    if (overlap.params) {
      const ends = gatherEnds(buckets);
      buckets.forEach((bucket, index) => {
        if (bucket.gatherS !== null) firstForward = Math.max(firstForward, ends[index] + (ready.forwardS - bucket.neededS));
      });
    } else {
      for (const bucket of buckets) if (bucket.gatherS !== null) gathers += bucket.gatherS;
    }
    const before = firstForward + (ready.num_microbatches - 1) * (ready.forwardS + ready.backwardS);
    return before + (Math.max(finish, ready.backwardS) + extra + ready.optimizer_s) + gathers;
  };

  // The same step as intervals on lanes: simulate_steps()[-1].
  const trace = (ready, buckets, costs, overlap) => {
    const intervals = [];
    let now = 0;
    const add = (lane, kind, bucket, start, stop) => intervals.push({lane, kind, bucket, start, stop});
    const compute = (kind, seconds) => {
      if (seconds > 0) {
        add("compute", kind, null, now, now + seconds);
        now += seconds;
      }
    };
    const wait = (kind, bucket, until) => {
      if (until > now) {
        add("wait", kind, bucket, now, until);
        now = until;
      }
    };
    const gathering = buckets.map((_, index) => index).filter(index => buckets[index].gatherS !== null);
    let done = 0;
    if (overlap.params) {
      const ends = gatherEnds(buckets);
      let begun = 0;
      for (const bucket of [...gathering].reverse()) {
        add("comm", "gather", bucket, begun, ends[bucket]);
        begun = ends[bucket];
      }
      for (const bucket of [...gathering].sort((a, b) => buckets[a].needed - buckets[b].needed || a - b)) {
        const needed = buckets[bucket].neededS;
        if (ends[bucket] > now + (needed - done)) {
          compute("forward", needed - done);
          done = needed;
          wait("gather", bucket, ends[bucket]);
        }
      }
    }
    compute("forward", ready.forwardS - done);
    for (let microbatch = 1; microbatch < ready.num_microbatches; microbatch++) {
      compute("backward", ready.backwardS);
      compute("forward", ready.forwardS);
    }
    const start = now;
    let free = start;
    compute("backward", ready.backwardS);
    buckets.forEach((bucket, index) => {
      if (bucket.reduceS === null) return;
      const begun = Math.max(free, start + (overlap.grads ? bucket.readyS : ready.backwardS));
      free = begun + bucket.reduceS;
      add("comm", "reduce", index, begun, free);
      wait("reduce", index, free);
    });
    for (const seconds of costs.extra_s) {
      const begun = now;
      add("comm", "step", null, begun, begun + seconds);
      wait("step", null, begun + seconds);
    }
    compute("optimizer", ready.optimizer_s);
    if (!overlap.params) {
      for (const bucket of gathering.reverse()) {
        const begun = now;
        add("comm", "gather", bucket, begun, begun + buckets[bucket].gatherS);
        wait("gather", bucket, begun + buckets[bucket].gatherS);
      }
    }
    const lengthOf = lane => intervals.filter(part => part.lane === lane)
      .reduce((sum, part) => sum + (part.stop - part.start), 0);
    return {
      intervals, stopS: now, stepS: stepS(ready, buckets, costs, overlap),
      computeS: lengthOf("compute"), exposedS: lengthOf("wait"), commS: lengthOf("comm"),
    };
  };

  return {costS, prepare, uniformPlan, bucketsOf, stepS, trace};
})();
