"""Which way of running several learners' captured steps is quickest."""
import itertools, json, os, sys, time
import torch
from torch import nn
from torch.nn import functional as F

dev = torch.device("cuda")


class Block(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.pad = after - before
        self.c1, self.n1 = nn.Conv2d(before, after, 3, 2 if self.pad else 1, 1, bias=False), nn.BatchNorm2d(after)
        self.c2, self.n2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)

    def forward(self, x):
        y = F.relu(self.n1(self.c1(x)))
        y = self.n2(self.c2(y))
        if self.pad:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.pad))
        return F.relu(x + y)


def resnet(w, channels=3):
    widths = [w] * 4 + [2 * w] * 3 + [4 * w] * 2
    return nn.Sequential(
        nn.Conv2d(channels, w, 3, 1, 1, bias=False), nn.BatchNorm2d(w), nn.ReLU(),
        *(Block(a, b) for a, b in itertools.pairwise(widths)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * w, 10))


class Learner:
    def __init__(self, w, last=False, fused=True):
        torch.manual_seed(0)
        self.model = resnet(w).to(dev)
        if last:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.lr = torch.tensor(0.01, device=dev)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=0.9, fused=True)
        self.x, self.y = torch.randn(16, 3, 32, 32, device=dev), torch.randint(10, (16,), device=dev)
        if last:
            self.x = self.x.to(memory_format=torch.channels_last)
        self.loss = None

    def step(self):
        self.opt.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.opt.step()
        self.loss = loss.detach()


def warm(learners, streams, n=3):
    cur = torch.cuda.current_stream()
    for _ in range(n):
        for l, s in zip(learners, streams):
            s.wait_stream(cur)
            with torch.cuda.stream(s):
                l.step()
        for s in streams:
            cur.wait_stream(s)
    torch.cuda.synchronize()


def branches(learners, streams):
    g, main = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    main.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(main):
        g.capture_begin(capture_error_mode="thread_local")
        for l, s in zip(learners, streams):
            s.wait_stream(main)
            with torch.cuda.stream(s):
                l.step()
        for s in streams:
            main.wait_stream(s)
        g.capture_end()
    return g.replay


def separate(learners, streams):
    graphs = []
    for l, s in zip(learners, streams):
        g = torch.cuda.CUDAGraph()
        with torch.cuda.stream(s):
            g.capture_begin(capture_error_mode="thread_local")
            l.step()
            g.capture_end()
        graphs.append(g)

    def replay():
        cur = torch.cuda.current_stream()
        e = cur.record_event()
        for g, s in zip(graphs, streams):
            s.wait_event(e)
            with torch.cuda.stream(s):
                g.replay()
            cur.wait_stream(s)
    return replay


def timed(f, n=40):
    for _ in range(5):
        f()
    torch.cuda.synchronize()
    t = time.perf_counter()
    for _ in range(n):
        f()
    cpu = time.perf_counter() - t
    torch.cuda.synchronize()
    return (time.perf_counter() - t) / n, cpu / n


def say(**k):
    print(json.dumps(k), flush=True)


say(torch=torch.__version__, gpu=torch.cuda.get_device_name(), cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version(),
    tf32=torch.backends.cudnn.allow_tf32, cpu=os.cpu_count())
t0 = time.time()
until = t0 + float(sys.argv[1])
for w, last, bench in [(16, False, False), (16, True, False), (16, False, True), (16, True, True)]:
    torch.backends.cudnn.benchmark = bench
    l = Learner(w, last)
    l.step(); l.step()
    from torch.profiler import profile, ProfilerActivity
    with profile(activities=[ProfilerActivity.CUDA]) as p_:
        l.step(); torch.cuda.synchronize()
    rows = sorted(p_.key_averages(), key=lambda r: -r.self_device_time_total)
    say(last=last, bench=bench, kernels=sum(r.count for r in rows), us=sum(r.self_device_time_total for r in rows))
    for r in rows[:26]:
        print("   ", r.count, round(r.self_device_time_total, 1), r.key[:90])
    p = sum(x.numel() for x in l.model.parameters())
    bare_opt = torch.optim.SGD(l.model.parameters(), lr=0.01, momentum=0.9)

    def bare():
        bare_opt.zero_grad()
        F.cross_entropy(l.model(l.x), l.y).backward()
        bare_opt.step()
    s, cpu = timed(bare, 40)
    say(w=w, last=last, bench=bench, params=p, bare=round(16 / s), bare_ms=s * 1e3, at=time.time() - t0)
    for how in (branches,):
        for k in (1, 8):
            if time.time() > until:
                sys.exit()
            if k == 16 and (last or bench):
                continue
            try:
                learners, streams = [Learner(w, last) for _ in range(k)], [torch.cuda.Stream() for _ in range(k)]
                t = time.time()
                warm(learners, streams)
                t1 = time.time()
                before = torch.cuda.memory_reserved()
                run = how(learners, streams)
                t2 = time.time()
                s, cpu = timed(run)
                # parity of one learner with eager from the same start
                say(w=w, last=last, bench=bench, how=how.__name__, k=k, samples_s=round(16 * k / s), ms=round(s * 1e3, 3),
                    cpu_ms=round(cpu * 1e3, 3), warm_s=round(t1 - t, 2), capture_s=round(t2 - t1, 2),
                    graph_mb=(torch.cuda.memory_reserved() - before) >> 20, loss=float(learners[-1].loss), at=round(time.time() - t0, 1))
                del run, learners
            except Exception as e:
                import traceback
                traceback.print_exc()
                say(w=w, how=how.__name__, k=k, error=repr(e)[:300])
