-------------------------------- MODULE Balance --------------------------------
(* How the members of a group share queues with a single active consumer, with nobody who leads: the decision of       *)
(* proxy/popgate/domain/balance.py, said once more in TLA+, so that another checker than our own looks at it.          *)
(* Members are numbers, and so are queues: their order is that of the names. A member decides by what it last saw of   *)
(* the broker, with what it has done since. RabbitMQ takes, of those in line with the highest priority, whom it likes. *)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS QueueCount, MemberCount,
          Handover,    \* "take": a higher priority displaces; "claim": it comes next; "sole": all others step aside
          Deaths,    \* so many times a member dies, at any moment, and is started again, at any later one
          Stale      \* whether members see what was, or what is

VARIABLES broker,    \* what there is: for each queue who is active, and the priority of everybody who is on it
          view,      \* for each member, what it knows of that
          up,        \* the members that live
          deaths,    \* so many are to come
          spare      \* so many interruptions of a consumer are left of those that are needed
vars == <<broker, view, up, deaths, spare>>

Queues  == 1..QueueCount
Members == 1..MemberCount
Nobody  == 0
Absent  == -1        \* the priority of one who is not on a queue

Least(S) == CHOOSE x \in S : \A y \in S : x <= y
Most(S)  == CHOOSE x \in S : \A y \in S : x >= y
Only(S)  == IF Cardinality(S) = 1 THEN Least(S) ELSE Nobody
Once(S)  == CHOOSE x \in S : TRUE
(* Once({e}), once({f(x) : x \in {e}}) and TLCEval(e) are e and f(e): TLC computes arguments and functions anew for each   *)
(* use of them, but elements of sets only once.                                                                      *)

-------------------------------------------------------------------------------
(* A queue, and who comes next. *)
Line(q)   == {m \in Members : q.on[m] # Absent /\ m # q.active}
First(q)  == LET line == Line(q) IN {m \in line : \A other \in line : q.on[other] <= q.on[m]}
Next_(q)  == Only(First(q))
Taken(q)  == Handover = "take" /\ q.active # Nobody /\ \E m \in Line(q) : q.on[m] > q.on[q.active]
Holder(q) == IF q.active = Nobody \/ Taken(q) THEN Next_(q) ELSE q.active
Orphan(q) == q.active = Nobody /\ Line(q) = {}
OnIt(q, m) == q.on[m] # Absent
Empty     == [active |-> Nobody, on |-> [m \in Members |-> Absent]]

(* Only the order of priorities matters, and which of them is 0; that of an active one only where it can be displaced. *)
Ranked(q) ==
  LET on == IF Handover = "take" \/ q.active = Nobody THEN q.on ELSE [q.on EXCEPT ![q.active] = 0]
  IN TLCEval([q EXCEPT !.on = TLCEval([m \in Members |-> IF on[m] <= 0 THEN on[m]
                        ELSE Cardinality({on[x] : x \in {y \in Members : on[y] > 0 /\ on[y] <= on[m]}})])])
(* Where nobody is active, RabbitMQ at once makes one of the first in line active. *)
Promoted(q) == IF q.active # Nobody \/ Line(q) = {} THEN {Ranked(q)}
               ELSE {Ranked([q EXCEPT !.active = m]) : m \in First(q)}
Joined(q, m, priority) == IF q.active = m THEN {q} ELSE Promoted([q EXCEPT !.on[m] = priority])
Left(q, m) == Promoted([active |-> IF q.active = m THEN Nobody ELSE q.active, on |-> [q.on EXCEPT ![m] = Absent]])

-------------------------------------------------------------------------------
(* The plan. Gifts are considered queue by queue, four times: orphans; to the next in line; to one in line; to any.   *)
Seen(v, me)  == {me} \cup {m \in Members : \E q \in Queues : OnIt(v[q], m)}
Count(v, m)  == Cardinality({q \in Queues : Holder(v[q]) = m})
Quota(v, ms, m) ==
  LET share == QueueCount \div Cardinality(ms)
      more  == QueueCount % Cardinality(ms)
      rich  == {x \in ms : Count(v, x) > share}
      ahead == IF m \in rich THEN {x \in rich : x < m} ELSE rich \cup {x \in ms \ rich : x < m}
  IN IF Cardinality(ahead) < more THEN share + 1 ELSE share
Receiver(gifts, v, ms, pass, q) ==
  LET holder == Holder(v[q])
      poor   == {m \in ms : gifts.due[m] > 0}
      asked  == CASE pass = 1 -> {Next_(v[q])} [] pass = 2 -> Line(v[q]) [] OTHER -> ms
  IN IF poor = {} \/ gifts.to[q] # Nobody THEN Nobody
     ELSE IF pass = 0 THEN IF Orphan(v[q]) THEN Least(poor) ELSE Nobody
     ELSE IF v[q].active # holder \/ holder \notin ms THEN Nobody
     ELSE IF gifts.due[holder] >= 0 \/ asked \cap poor = {} THEN Nobody
     ELSE Least(asked \cap poor)
Given(gifts, v, q, m) ==
  IF m = Nobody THEN gifts
  ELSE [to  |-> TLCEval([gifts.to EXCEPT ![q] = m]),
        due |-> TLCEval([x \in Members |->
                         gifts.due[x] - (IF x = m THEN 1 ELSE 0) + (IF x = Holder(v[q]) THEN 1 ELSE 0)])]
RECURSIVE Gifts(_, _, _, _)
Gifts(gifts, v, ms, turn) ==
  LET pass == turn \div QueueCount
      q    == 1 + (turn % QueueCount)
  IN IF turn = 4 * QueueCount THEN gifts
     ELSE IF turn = QueueCount /\ \E x \in Queues : Holder(v[x]) \notin ms /\ Line(v[x]) # {} THEN gifts
     ELSE Once({Gifts(after, v, ms, next) : next \in {turn + 1},
                    after \in {Given(gifts, v, q, to) : to \in {Receiver(gifts, v, ms, pass, q)}}})
Plan(v, me) ==
  Once({Gifts(gifts, v, ms, 0).to : ms \in {Seen(v, me)},
        gifts \in {[to  |-> TLCEval([q \in Queues |-> Nobody]),
                    due |-> TLCEval([m \in Members |->
                              IF m \in Seen(v, me) THEN Quota(v, Seen(v, me), m) - Count(v, m) ELSE 0])]}})

-------------------------------------------------------------------------------
(* What a member does about a queue: <<>> is nothing; otherwise what, and with which priority.                       *)
Above(q) == 1 + Most({0} \cup {q.on[m] : m \in Line(q)}
                         \cup (IF Handover = "take" /\ q.active # Nobody THEN {q.on[q.active]} ELSE {}))
Step(q, to, me) ==
  LET moved == to \notin {Nobody, me}
  IN IF q.active = me THEN IF moved /\ Handover # "take" /\ Next_(q) = to THEN <<"leave", 0>> ELSE <<>>
     ELSE IF OnIt(q, me) THEN
          IF to = me /\ (Handover = "take" \/ (Handover = "claim" /\ Next_(q) # me)) THEN <<"join", Above(q)>>
          ELSE IF moved /\ Handover = "sole" THEN <<"leave", 0>> ELSE <<>>
     ELSE IF to = me THEN <<"join", IF Orphan(q) \/ Handover = "sole" THEN 0 ELSE Above(q)>>
     ELSE IF moved /\ (Orphan(q) \/ Handover = "sole") THEN <<>> ELSE <<"join", 0>>
Results(q, step, me) == IF step[1] = "leave" THEN Left(q, me)
                        ELSE IF OnIt(q, me) /\ step[2] = 0 THEN {q} ELSE Joined(q, me, step[2])

Known(me) == IF Stale THEN view[me] ELSE broker
Does(me, plan, q) ==
  /\ \E step \in {Step(Known(me)[q], plan[q], me)} :
       /\ step # <<>>
       /\ \E after \in Results(broker[q], step, me) :
            /\ broker' = [broker EXCEPT ![q] = after]
            /\ spare' = spare - (IF broker[q].active = me /\ after.active # me THEN 1 ELSE 0)
            /\ IF ~Stale THEN view' = view
               ELSE IF view[me][q] = broker[q] THEN view' = [view EXCEPT ![me][q] = after]
               ELSE \E foreseen \in Results(view[me][q], step, me) : view' = [view EXCEPT ![me][q] = foreseen]
  /\ UNCHANGED <<up, deaths>>
(* RabbitMQ displaces the active consumer, once that one has settled what it has: TAKE only. *)
Displaces(q) ==
  /\ Taken(broker[q])
  /\ \E m \in First(broker[q]) : broker' = [broker EXCEPT ![q] = Ranked([@ EXCEPT !.active = m])]
  /\ spare' = spare - 1
  /\ UNCHANGED <<view, up, deaths>>
Looks(me) ==
  /\ Stale /\ me \in up /\ view[me] # broker
  /\ view' = [view EXCEPT ![me] = broker]
  /\ UNCHANGED <<broker, up, deaths, spare>>
Dies(me) ==
  /\ me \in up /\ deaths > 0
  /\ broker' \in {after \in [Queues -> UNION {Left(broker[q], me) \cup {broker[q]} : q \in Queues}] :
                    \A q \in Queues : after[q] \in IF OnIt(broker[q], me) THEN Left(broker[q], me) ELSE {broker[q]}}
  /\ up' = up \ {me} /\ deaths' = deaths - 1
  /\ view' = IF Stale THEN [view EXCEPT ![me] = [q \in Queues |-> Empty]] ELSE view
  /\ UNCHANGED spare
Starts(me) ==
  /\ me \notin up /\ up' = up \cup {me}
  /\ view' = IF Stale THEN [view EXCEPT ![me] = broker] ELSE view
  /\ UNCHANGED <<broker, deaths, spare>>

Acts(me) == Looks(me) \/ (me \in up /\ \E plan \in {Plan(Known(me), me)}, q \in Queues : Does(me, plan, q))
Own  == (\E me \in Members : Acts(me)) \/ (\E q \in Queues : Displaces(q))
Next == Own \/ \E me \in Members : Dies(me) \/ Starts(me)

(* It starts anywhere where everybody is on every queue, and all have seen it. *)
Subscribed == {[active |-> m, on |-> [x \in Members |-> 0]] : m \in Members}
Active(m) == Cardinality({q \in Queues : broker[q].active = m})
RECURSIVE Sum(_, _)
Sum(f, S) == IF S = {} THEN 0 ELSE LET x == Least(S) IN f[x] + Sum(f, S \ {x})
Fewest ==            \* all above the share must move, but for those who may keep one more
  LET share == QueueCount \div MemberCount
      above == {m \in Members : Active(m) > share}
      more  == QueueCount % MemberCount
  IN Sum([m \in Members |-> Active(m) - share], above) - (IF more < Cardinality(above) THEN more ELSE Cardinality(above))
Init ==
  /\ broker \in [Queues -> Subscribed]
  /\ view = IF Stale THEN [m \in Members |-> broker] ELSE <<>>
  /\ up = Members /\ deaths = Deaths /\ spare = Fewest

(* Something goes on as long as anything can; nothing is assumed of who or what. That it comes to an end is shown. *)
Spec == Init /\ [][Next]_vars /\ WF_vars(Own \/ \E me \in Members : Starts(me))

-------------------------------------------------------------------------------
(* What is promised. *)
WellTyped == \A q \in Queues : /\ broker[q].active \in {Nobody} \cup Members
                               /\ \A m \in Members : broker[q].on[m] \in Absent..MemberCount
OneActiveIsOnIt == \A q \in Queues : broker[q].active # Nobody => OnIt(broker[q], broker[q].active)
Balanced == /\ \A q \in Queues : broker[q].active # Nobody /\ \A m \in up : OnIt(broker[q], m)
            /\ \A x, y \in up : Active(x) - Active(y) <= 1
RestsInBalance == (~ENABLED Own) => Balanced
(* No consumer is interrupted but to move a queue that has to move. Who dies makes others move, too. *)
FewestInterruptions == Deaths = 0 => spare >= 0
(* Where nobody dies, no step leaves a queue that somebody consumed without a consumer. *)
NoGap == [][Deaths = 0 => \A q \in Queues : broker[q].active # Nobody => broker'[q].active # Nobody]_vars
ComesToBalanceAndStays == <>[](Balanced /\ up = Members)
===============================================================================
