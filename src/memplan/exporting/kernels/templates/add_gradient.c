/* Add an element of a gradient to those of the calls before. */
static void add_gradient(STATE *s, int k, float g) { s->gradients[k] += g; }
