from quire.sampling_params import SamplingParams
from quire.scheduler.queues import QUEUES
from quire.scheduler.request import Request


def names(queue) -> list[str]:
    return [request.request_id for request in queue]


def test_fcfs_keeps_arrival_order_and_puts_preempted_requests_in_front():
    a, b, c, d = (
        Request(request_id=name, prompt_token_ids=[1], sampling_params=SamplingParams()) for name in "abcd"
    )
    queue = QUEUES["fcfs"]()
    queue.add(c)
    queue.add(d)
    queue.put_back(b)
    queue.put_back(a)
    assert (names(queue), queue.peek(), len(queue)) == (["a", "b", "c", "d"], a, 4)
    queue.remove(c)
    queue.remove(a)
    assert (names(queue), queue.peek(), len(queue)) == (["b", "d"], b, 2)
