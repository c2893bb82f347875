"""First words of docstrings that `test_structure.py` accepts. Add the verb that you need."""

from __future__ import annotations

_VERBS = """
abort accept account accumulate acknowledge add adjust advance advise aggregate align allocate allow answer append apply
approximate arrange ask assemble assert assign associate assume attach attribute average avoid balance be begin bind
bisect block bound bring build cache calculate call cancel capture carry cast catch change charge check choose classify
clean clear clip clone close collapse collect combine compare compile complete compute concatenate configure confirm
connect construct consume contain continue convert convolve copy correct count create crop cut decide declare decode
decompose decrease deduce define delay delete derive describe detach detect determine disable discard dispatch display
divide do draw drop dump edit emit emulate enable encode end ensure enter enumerate erase estimate evaluate evict
exclude execute exit expand expect explain export expose express extend extract extrapolate fail fall fetch fill filter
find finish fit fix flatten flip fold follow forbid force forget form format forward free fuse gather generate get give
go group grow guard guess hand handle hash hide hold identify ignore import include increase index infer inform
initialize inline insert inspect install instantiate interpolate interpret intersect introduce invalidate invert invoke
iterate join judge keep know label lay learn leave let lift limit link list load locate lock log look lower make map
mark mask match materialize measure mend merge minimize mirror model modify move multiply name narrow normalize note
notify number observe obtain offer omit open order overwrite pack pad pair parse partition pass patch pause perform
permute pick place plan plot point pop predict prefer prepare preserve prevent print probe proceed produce profile
project promote propagate propose prove provide prune pull purge push put quantize query raise rank re-read reach read
rearrange rebuild recapture recognize recompute record redirect redraw reduce refer refine refuse register reject relate
release reload remember remove rename render reorder repeat replace replay report represent request require reset
reshape resolve restore restrict resume retrace retry return reuse reverse revert rewrite round run sample satisfy save
say scale scan schedule score search see select send separate serialize serve set share shield shift show shrink signal
simplify simulate size skip slice solve sort speak spell split spread start state step stop store strip study subtract
suggest sum summarize suppress swap sweep switch tag take tell test throw tie time total trace track train transfer
transform translate transpose traverse treat trim try tune turn undo unfold unify union unpack unwrap update upgrade use
validate verify view visit wait walk warn watch weigh widen wrap write yield zero
"""

# In the imperative: what the function does for its caller.
VERBS = frozenset(_VERBS.split())

# For a function that only gives a value, the noun that names it.
NOUNS = frozenset({"Bytes", "Seconds"})

NO_OPENINGS = frozenset(
    {"A", "An", "All", "Every", "How", "New", "One", "The", "Those", "What", "Where", "Whether", "Which", "Whose"}
)
