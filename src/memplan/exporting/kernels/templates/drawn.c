/* A number from 0 to 1, 1 excluded, for a weight in this step: in whatever order weights are updated, each has its own.
   Hash by C. Wellons (lowbias32, 2018). */
static float drawn(const STATE *s, uint32_t place)
{
    uint32_t x = s->random + s->step * 0x9E3779B9u + place * 0x85EBCA6Bu;
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return (float)((x ^ x >> 16) >> 8) * (1.0f / 16777216);
}
