"""Takes the tokens of locks from holders that can't know: their connections and channels live on.

RabbitMQ does this if it considers the holder's node lost while that node is only paused, or cut off from the others.
Here its queues believe so for a moment, which takes neither a pause nor the time until a node counts as lost.
"""

from support.rabbitmq import RabbitNode

TAKE_TOKENS = """
    Ask = fun(Leader, About) -> {ok, {_, Answer}, _} = ra:local_query(Leader, About), Answer end,
    Take = fun(Leader) ->
        case Ask(Leader, fun rabbit_fifo:query_single_active_consumer/1) of
            {value, {_, Holder}} ->
                Consumers = maps:to_list(Ask(Leader, fun rabbit_fifo:query_consumers/1)),
                [Key] = [Key || {Key, Consumer} <- Consumers, element(1, Consumer) =:= Holder],
                [ra:pipeline_command(Leader, Event, no_correlation, normal)
                 || Event <- [{down, Holder, noconnection}, {timeout, {consumer_disconnected_timeout, Key}}]];
            _ -> free
        end
    end,
    IsToken = fun(Queue) ->
        {resource, _, queue, Name} = amqqueue:get_name(Queue),
        binary:longest_common_suffix([Name, <<":token">>]) =:= 6
    end,
    [catch Take(amqqueue:get_pid(Queue)) || Queue <- rabbit_amqqueue:list(), IsToken(Queue)], taken.
"""
"""The second event is for 4.3, which waits before it takes the message from a holder; other releases ignore it."""


def take_tokens(node: RabbitNode) -> None:
    """Take the token of each held lock of the node's cluster. The holder stays in the line. Takes half a second.

    On 4.x the holder's node must not be the only one: it would get the token again at once. Raises: ServerFailedError.
    """
    node.ctl("eval", TAKE_TOKENS)
